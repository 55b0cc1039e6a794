"""Where the time of a call goes: by part of a step, and by kernel."""
