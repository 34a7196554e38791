"""Tests that kill commands, fill their disks, and start them in pairs."""
