"""Parts that everything else is built on; imports nothing else of the package."""
