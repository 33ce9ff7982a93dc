package agent

import (
	"strings"
)

// plainWords splits a line for the shell that is one program with plain words
// as arguments, such as "python3 -m pytest tests/unit". A shell would look for
// the program in PATH and become it, so it can be started in the shell's place,
// which saves the shell's own start: under gVisor that is half of a short
// command's time. Whatever the shell would treat in any other way, a quote, a
// variable, a builtin, is not plain.
func plainWords(line string) ([]string, bool) {
	words := strings.FieldsFunc(strings.TrimRight(line, "\n"), func(r rune) bool { return r == ' ' || r == '\t' })
	if len(words) == 0 || strings.Contains(words[0], "=") || shellWords[words[0]] {
		return nil, false
	}
	for _, w := range words {
		for _, c := range []byte(w) {
			if !plain(c) {
				return nil, false
			}
		}
	}
	return words, true
}

func plain(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("_@%+:,./=-", c) >= 0
}

// shellWords are the words that bash or a POSIX shell acts on itself. "true"
// and "false" are left out: the programs of these names do the same.
var shellWords = func() map[string]bool {
	words := map[string]bool{}
	for w := range strings.FieldsSeq(`. : alias bg bind break builtin caller case cd command compgen complete compopt
		continue coproc declare dirs disown do done echo elif else enable esac eval exec exit export fc fg fi for
		function getopts hash help history if in jobs kill let local logout mapfile popd printf pushd pwd read
		readarray readonly return select set shift shopt source suspend test then time times trap type typeset
		ulimit umask unalias unset until wait while`) {
		words[w] = true
	}
	return words
}()

// shellStartup reports whether the environment makes a shell do more at its
// start than take over the environment.
func shellStartup(env map[string]string) bool {
	for name := range env {
		switch name {
		case "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "POSIXLY_CORRECT":
			return true
		}
		if strings.HasPrefix(name, "BASH_FUNC_") {
			return true
		}
	}
	return false
}

// direct returns the program and the words of a request for the shell that
// needs no shell.
func direct(cmd string, args []string, env map[string]string, dir string) (program string, words []string, ok bool) {
	if cmd != "" || len(args) != 2 || args[0] != "-c" || shellStartup(env) {
		return "", nil, false
	}
	if words, ok = plainWords(args[1]); !ok {
		return "", nil, false
	}
	program, err := findProgram(words[0], env["PATH"], dir)
	return program, words, err == nil // that there is none is the shell's to say
}
