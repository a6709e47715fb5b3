# Completion of cloche for fish.
function __cloche_complete
    set -l words (commandline -opc) (commandline -ct)
    cloche __complete -- $words[2..-1] 2>/dev/null
end
complete -c cloche -a '(__cloche_complete)'
