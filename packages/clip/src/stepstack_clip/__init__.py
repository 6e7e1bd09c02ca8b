"""Clipping as one number on the device."""
