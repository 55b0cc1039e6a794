"""What must hold between keys of several sections."""
