package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/durable"
)

// PackAgent puts the agent's binary into dir in the two forms that backends
// mount, in a directory named after its content: the same binary is packed
// once, and another one does not touch what sandboxes have mounted.
func PackAgent(ctx context.Context, agentBinary, dir string) (backend.Agent, error) {
	sum, err := fileDigest(agentBinary)
	if err != nil {
		return backend.Agent{}, fmt.Errorf("pack the agent: %w", err)
	}
	agent := AgentAt(dir, "agent-"+sum[:16])
	at := filepath.Dir(agent.Dir)
	if _, err := os.Stat(at); err == nil {
		return agent, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return backend.Agent{}, fmt.Errorf("pack the agent: %w", err)
	}
	tmp, err := os.MkdirTemp(dir, ".agent-")
	if err != nil {
		return backend.Agent{}, diskFault("pack the agent", err)
	}
	err = packInto(ctx, agentBinary, tmp)
	if err == nil {
		err = os.Rename(tmp, at)
		if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTEMPTY) {
			err = nil // another process packed it meanwhile
		}
	}
	if err := errors.Join(err, os.RemoveAll(tmp)); err != nil {
		return backend.Agent{}, diskFault("pack the agent", err)
	}
	return agent, nil
}

// AgentAt returns the agent of an ID that PackAgent has made in dir.
func AgentAt(dir, id string) backend.Agent {
	at := filepath.Join(dir, id)
	return backend.Agent{ID: id, EROFS: filepath.Join(at, "agent.erofs"), Dir: filepath.Join(at, "dir")}
}

// PruneAgents removes what PackAgent has made in dir, but for the agents of the
// IDs to keep: those that something has mounted or will mount again.
func PruneAgents(dir string, keep ...string) error {
	made, err := filepath.Glob(filepath.Join(dir, "agent-*"))
	for _, at := range made {
		if !slices.Contains(keep, filepath.Base(at)) {
			err = errors.Join(err, os.RemoveAll(at))
		}
	}
	return err
}

func packInto(ctx context.Context, agentBinary, tmp string) error {
	tree := filepath.Join(tmp, "dir")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	in, err := os.Open(agentBinary)
	if err != nil {
		return err
	}
	defer in.Close()
	binary := filepath.Join(tree, "agent")
	if err := copyFile(binary, in, 0o755); err != nil {
		return err
	}
	for _, name := range []string{binary, tree, tmp} {
		if err := os.Chmod(name, 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{binary, tree} {
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, name, make([]unix.Timespec, 2), 0); err != nil {
			return err
		}
	}
	file := filepath.Join(tmp, "agent.erofs")
	if err := mkfs(ctx, file, tree); err != nil {
		return err
	}
	return errors.Join(durable.Path(binary), durable.Path(file), durable.Path(tree), durable.Path(tmp))
}

func fileDigest(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
