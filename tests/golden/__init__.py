"""What the program prints and draws of the bundled data, stored to be compared before and after a
change of the code.
"""
