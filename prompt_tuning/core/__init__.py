"""Parts that all other rooms build on; imports nothing else of the package."""
