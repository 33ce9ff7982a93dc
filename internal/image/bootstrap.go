package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/debian"
)

// BootstrapOptions says what base image to build.
type BootstrapOptions struct {
	Distribution string   // "debian"
	Packages     []string // beside Python, pip, curl and git
}

// bootstrapBytes is how much of the disk a build needs, in bytes: packages,
// tree and EROFS file.
const bootstrapBytes = 2 << 30

// Bootstrap builds a base image from the machine's own package mirror and
// brings it into the store. Its digest is that of its content.
//
// Faults: InvalidArgument for the field "distribution" or "packages",
// Unavailable (mmdebstrap is missing or the mirror does not answer), Capacity.
// Nothing is left behind.
func (s *Store) Bootstrap(ctx context.Context, o BootstrapOptions, report func(Progress)) (Artifact, error) {
	if o.Distribution != "debian" {
		return Artifact{}, fault.Invalid("distribution", "cannot build %q; \"debian\" can be built", o.Distribution)
	}
	if err := s.room(bootstrapBytes); err != nil {
		return Artifact{}, err
	}
	st, err := s.stage()
	if err != nil {
		return Artifact{}, err
	}
	p := newProgress(report)
	a, err := s.bootstrapStaged(ctx, st, o, p)
	if err := errors.Join(err, removeStaging(st.dir)); err != nil {
		return Artifact{}, err
	}
	p.step("done", a.Digest, a.Size)
	return a, nil
}

func (s *Store) bootstrapStaged(ctx context.Context, st *staging, o BootstrapOptions, p *progress) (Artifact, error) {
	p.step("pull", "building "+o.Distribution+" from the machine's package mirror", 0)
	err := debian.Build(ctx, debian.Options{
		Tree: st.tree, Work: st.dir, Packages: o.Packages, Now: time.Now(),
		Line: func(line string) { p.step("unpack", line, 0) },
	})
	if err != nil {
		return Artifact{}, err
	}
	p.step("build", "making one EROFS file", 0)
	if err := s.build(ctx, st, 0); err != nil {
		return Artifact{}, err
	}
	a := Artifact{
		Kind: KindOCI, Architecture: "amd64", Source: "bootstrap:" + o.Distribution,
		Config: Config{Env: debian.Env, Cmd: []string{"/bin/bash"}},
	}
	if a.Digest, err = contentDigest(filepath.Join(st.dir, "image", rootfsName), a.Config); err != nil {
		return Artifact{}, err
	}
	return s.publish(st, a)
}

// contentDigest returns the digest of an image that has no manifest: of its
// configuration and its EROFS file's digest.
func contentDigest(file string, c Config) (string, error) {
	rootfs, err := fileDigest(file)
	if err != nil {
		return "", fmt.Errorf("compute the image's digest: %w", err)
	}
	b, err := json.Marshal(struct {
		Rootfs string `json:"rootfs"`
		Config Config `json:"config"`
	}{"sha256:" + rootfs, c})
	if err != nil {
		return "", fmt.Errorf("compute the image's digest: %w", err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}
