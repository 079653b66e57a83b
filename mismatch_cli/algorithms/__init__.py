"""The algorithms: what one is, the table of published ones, and how a user names one."""
