"""The sections of the configuration as typed objects, one file per section."""
