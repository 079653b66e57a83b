"""What people look at: terminal, HTML, plots, JSON and exports, all made from traces."""
