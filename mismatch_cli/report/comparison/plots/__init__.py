"""The figures of `compare`, one file each; the contract is that of `report/plots`."""
