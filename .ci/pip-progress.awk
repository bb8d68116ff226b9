# Shortens the output of `pip install --verbose`: pip's own steps, and one line for every 5 % that ninja has compiled.
/^ *\[[0-9]+\/[0-9]+\] / {
  match($0, /\[[0-9]+\/[0-9]+\]/)
  split(substr($0, RSTART + 1, RLENGTH - 2), done, "/")
  step = int(20 * done[1] / done[2])
  if (step != last) { print "  compiling llama.cpp [" done[1] "/" done[2] "]"; fflush(); last = step }
  next
}
/^ *Collecting / { print "  " $1, $2; fflush() }
/^ *(Downloading .* MB|Building wheel for|Building editable for|Installing collected|Successfully installed)/ {
  sub(/^ */, "  "); print substr($0, 1, 110); fflush()
}
