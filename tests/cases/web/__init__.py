"""A small web project in direct mode, for servers that tests start as processes."""
