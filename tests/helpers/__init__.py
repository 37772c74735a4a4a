"""What tests share. The only place for helpers."""
