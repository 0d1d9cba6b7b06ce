"""How ranks start, meet, agree and end."""
