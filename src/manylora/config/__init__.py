"""What an engine is told: its settings and the record that `manylora build` leaves."""
