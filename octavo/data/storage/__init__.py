"""Where files of data are and what is kept of them: folders, URLs, the hub, the cache."""
