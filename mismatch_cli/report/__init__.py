"""How results look: terminal, HTML, plots, JSON and exports, all made from traces."""
