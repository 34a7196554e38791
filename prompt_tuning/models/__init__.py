"""What is frozen: configs, layers, and the prompted models built of them."""
