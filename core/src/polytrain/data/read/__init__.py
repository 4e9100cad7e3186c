"""What users give as data, turned into pieces that any process can read rows from."""
