"""Dynamic loss scaling that never waits for the device."""
