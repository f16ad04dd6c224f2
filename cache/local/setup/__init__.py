"""What happens when a cache folder is opened."""
