"""The figures of `clipstats`, one file each, with the contract of `report/plots`."""
