"""The heat map: ranks or hosts down, steps across."""
