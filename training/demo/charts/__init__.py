"""The report's charts: each a pure function from logged numbers to one inline SVG."""
