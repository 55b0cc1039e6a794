"""A model's forward as training and generation call it: packed rows, paged attention, unused towers."""
