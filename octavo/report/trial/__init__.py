"""The trial of `octavo compare`: its design, its runs, the verdict and its page."""
