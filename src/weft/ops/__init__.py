"""A collective and the product that depends on it, as one operation."""
