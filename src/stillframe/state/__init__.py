"""What a state is: walked, named by dtype, cut into boxes and divided over ranks.  Knows torch; knows no files."""
