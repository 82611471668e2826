"""The representation that every part shares: graphs, remarks, sites, plans, regions."""
