"""The bytes of a checkpoint: manifest, tables, objects and payload files. Knows neither torch nor ranks at work."""
