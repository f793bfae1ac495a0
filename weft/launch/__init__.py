"""Starting ranks, joining them, and ending them together."""
