"""Campaigns that try to break asyncrl for as long as one likes; README.md says which there are."""
