package agent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/agent/account"
	"github.com/kernflux/opendsec/internal/agent/proc"
)

// defaultPath is PATH where the image sets none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// start runs a command for a caller. Errors are Connect errors that name what
// is wrong.
func (s *Server) start(c caller, req proc.Request, stdin bool, timeout time.Duration) (*proc.Process, *proc.Subscription, error) {
	dir, err := c.commandDir(req.Dir)
	if err != nil {
		return nil, nil, err
	}
	env := environment(c.User, s.identity.Load().env, req.Env)
	spec := proc.Spec{
		Request: req, Dir: dir, User: s.own.credential(c.User), Stdin: stdin, Timeout: timeout,
	}
	if program, words, ok := direct(req.Cmd, req.Args, env, dir); ok {
		asShell := maps.Clone(env) // with what a shell sets for the program that it becomes
		asShell["PWD"], asShell["SHLVL"], asShell["_"] = dir, "0", program
		spec.Path, spec.Args, spec.Env = program, words, list(asShell)
		if p, sub, err := s.table.Start(spec); err == nil {
			return p, sub, nil
		} // why not is the shell's to say
	}
	if spec.Path, err = findProgram(req.Cmd, env["PATH"], dir); err != nil {
		return nil, nil, err
	}
	spec.Args, spec.Env = append([]string{spec.Path}, req.Args...), list(env)
	if req.Cmd != "" {
		spec.Args[0] = req.Cmd
	}
	p, sub, err := s.table.Start(spec)
	if errors.Is(err, syscall.ENOENT) && req.Dir == nil && c.workdir == "" && !exists(dir) {
		spec.Dir = "/" // a user without a home
		p, sub, err = s.table.Start(spec)
	}
	if err != nil {
		return nil, nil, startError(err, &spec, c.User)
	}
	return p, sub, nil
}

func (c *caller) commandDir(asked *string) (string, error) {
	if asked == nil || *asked == "" {
		return c.home(), nil
	}
	dir, err := c.path(*asked)
	if err != nil {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd: %w", err))
	}
	return dir, nil
}

// environment returns a command's variables: the user's own, over them the
// sandbox's, over them the request's.
func environment(u account.User, sandbox, request map[string]string) map[string]string {
	env := make(map[string]string, 4+len(sandbox)+len(request))
	env["PATH"], env["HOME"], env["USER"], env["LOGNAME"] = defaultPath, u.Home, u.Name, u.Name
	maps.Copy(env, sandbox)
	maps.Copy(env, request)
	return env
}

func list(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	return out
}

// findProgram returns the path of a command's program. A name without a slash
// is looked for in the command's own PATH; no name means the sandbox's shell.
func findProgram(cmd, searchPath, dir string) (string, error) {
	switch {
	case cmd == "" && executable("/bin/bash"):
		return "/bin/bash", nil
	case cmd == "":
		return "/bin/sh", nil
	case strings.Contains(cmd, "/"):
		return cmd, nil
	}
	for place := range strings.SplitSeq(searchPath, ":") {
		if !path.IsAbs(place) {
			place = path.Join(dir, place) // an empty one is the current directory
		}
		if file := place + "/" + cmd; executable(file) {
			return file, nil
		}
	}
	return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("program '%s' is not in the command's PATH (%s)", cmd, searchPath))
}

// executable reports whether a file is one that somebody may run.
func executable(file string) bool {
	var st syscall.Stat_t
	return syscall.Stat(file, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Mode&0o111 != 0
}

func exists(file string) bool {
	var st syscall.Stat_t
	return !errors.Is(syscall.Stat(file, &st), syscall.ENOENT)
}

// startError says what was wrong with a command that the kernel refused.
// Looking after the fact keeps the way of those that run short.
func startError(err error, spec *proc.Spec, u account.User) error {
	code := connect.CodeInvalidArgument
	program := spec.Path
	if !path.IsAbs(program) {
		program = path.Join(spec.Dir, program)
	}
	info, dirErr := os.Stat(spec.Dir)
	switch {
	case errors.Is(dirErr, os.ErrNotExist):
		err = fmt.Errorf("cwd '%s' does not exist", spec.Dir)
	case dirErr != nil:
		err = fmt.Errorf("cwd '%s' cannot be used: %w", spec.Dir, dirErr)
	case !info.IsDir():
		err = fmt.Errorf("cwd '%s' is not a directory", spec.Dir)
	case errors.Is(err, syscall.ENOENT) && spec.Request.Cmd == "" && !exists(program):
		err = errors.New("the sandbox's image has no shell: neither /bin/bash nor /bin/sh exists; name a program instead")
	case errors.Is(err, syscall.ENOENT) && !exists(program):
		err = fmt.Errorf("program '%s' does not exist", program)
	case errors.Is(err, syscall.ENOENT):
		err = fmt.Errorf("program '%s' cannot run: the interpreter or loader that it names does not exist", program)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		err = fmt.Errorf("user '%s' may not run '%s' in '%s': %w", u.Name, program, spec.Dir, err)
	case errors.Is(err, syscall.ENOEXEC):
		err = fmt.Errorf("'%s' is not a program that this machine can run: %w", program, err)
	case errors.Is(err, syscall.E2BIG):
		err = fmt.Errorf("arguments and environment of '%s' are too long: %w", program, err)
	case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG):
		err = fmt.Errorf("program '%s' or one of its arguments or variables cannot be used: %w", program, err)
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		code, err = connect.CodeResourceExhausted, fmt.Errorf("start '%s': the sandbox is at its limit of processes, memory or files: %w", program, err)
	default:
		code, err = connect.CodeInternal, fmt.Errorf("start '%s': %w", program, err)
	}
	return connect.NewError(code, err)
}
