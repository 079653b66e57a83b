"""The figures, one file each: a module with TITLE, CAPTION, `needs(data)` and `draw(figure, data, style)` is a plot.

`draw` gets an empty matplotlib figure and a `Style`: it sets the figure's height, places its panels with `panels`, and
takes every colour from the style, so that one drawing serves light and dark, desk and phone.
"""
