"""The figures, one file each: a module with TITLE, CAPTION, DATA, `needs(data)` and
`draw(figure, data)` is a plot; DATA says in words what `needs` asks for.

`alternative(data)` is optional: the text instead of the picture, where the drawn lines, points,
bars and cells do not say it (`drawing/words.py` reads those). `EXPLORED = True`: its dots are those
of the explorer, and it is not on a page that has one.

`draw` gets an empty `Sheet`, a matplotlib figure that knows its style. It asks the sheet for
panels, which sets its height, and takes every colour from its theme, so that one drawing serves
light and dark.
"""
