"""From a configuration to a job that can be trained: filled in, checked, planned, built or resumed."""
