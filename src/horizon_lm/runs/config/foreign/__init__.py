"""Tables about the settings of other trainers."""
