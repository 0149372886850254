"""What can be seen of a server: metrics under three names, and traces."""
