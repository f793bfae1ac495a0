"""Data: rows -> Documents with loss weights, and the order in which optimizer steps take them."""
