"""The configuration of a run: schema in `schema.py`, reading and error reporting in `load.py`."""
