"""What report.py puts on the pages of the documentation: tables and pictures, made from files of results."""
