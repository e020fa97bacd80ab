"""The HTTP server (extra [server])."""
