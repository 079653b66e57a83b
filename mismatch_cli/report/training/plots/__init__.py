"""The figures of `train`, one file each, with the contract of `report/plots`."""
