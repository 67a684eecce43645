"""A reference parallel trainer that uses omniload and checkpoint through their public API."""
