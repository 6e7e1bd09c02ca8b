"""Any elementwise optimizer, its states spread over a mesh of ranks."""
