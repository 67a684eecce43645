"""Moving bytes between tensors and storage, and agreeing about it between ranks."""
