"""Storage of data files and of their converted forms: folders, URLs, the hub, the cache."""
