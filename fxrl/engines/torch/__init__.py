"""The embedded engine: sampling with the very model that is trained."""
