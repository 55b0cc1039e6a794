"""What the frameworks share on the way to a configuration of Octavo."""
