package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/layer"
	"github.com/kernflux/opendsec/internal/image/source"
)

// ImportOptions says what to import and how to reach it.
type ImportOptions struct {
	// Source is a registry reference, "docker-archive:PATH[:TAG]",
	// "oci:PATH[:TAG]" or "oci-archive:PATH[:TAG]".
	Source       string
	Architecture string // "" means "amd64"
	Username     string // login at the registry; "" takes that of ~/.docker/config.json, if any
	Password     string
	CA           []byte // PEM of authorities to trust besides the machine's own
	PlainHTTP    bool   // allow plain HTTP; on loopback it always is
	// Mirrors maps a registry's host to hosts ("host[:port][/prefix]") that are
	// asked before it, in order.
	Mirrors map[string][]string
	Seconds int // to wait for a registry's first answer; 0 means 5
}

// How downloads go.
const (
	parallel = 3 // layers at once
	attempts = 3 // for one layer
)

// Import brings an image into the store. One whose digest is there already is
// not fetched again; of several imports of one digest one works and the others
// wait. report, if not nil, is called by one goroutine at a time.
//
// Faults: InvalidArgument for the field "source" (not understood, not for this
// architecture, damaged, a digest that does not match), NotFound,
// PermissionDenied (the registry refuses), Unavailable (the registry does not
// answer), Capacity (the disk is full). Nothing is left behind.
func (s *Store) Import(ctx context.Context, o ImportOptions, report func(Progress)) (Artifact, error) {
	tmp, err := os.MkdirTemp(filepath.Join(s.dir, stagingName), "open-")
	if err != nil {
		return Artifact{}, diskFault("make a staging directory", err)
	}
	img, err := source.Open(ctx, o.Source, source.Options{
		Architecture: o.Architecture, Username: o.Username, Password: o.Password, CA: o.CA,
		PlainHTTP: o.PlainHTTP, Mirrors: o.Mirrors, Seconds: o.Seconds, TempDir: tmp,
	})
	if err := errors.Join(err, removeStaging(tmp)); err != nil {
		return Artifact{}, err
	}
	defer func() {
		if err := img.Close(); err != nil {
			s.log.Warn("close an image's source", "source", o.Source, "error", err)
		}
	}()
	p := newProgress(report)
	a, err := s.once(ctx, img.Digest, func() (Artifact, error) { return s.add(ctx, img, o.Source, p) })
	if err != nil {
		return Artifact{}, err
	}
	p.step("done", a.Digest, a.Size)
	return a, nil
}

// once returns the image of a digest, which work makes if it is not there.
func (s *Store) once(ctx context.Context, digest string, work func() (Artifact, error)) (Artifact, error) {
	for {
		s.mu.Lock()
		other := s.flying[digest]
		if other == nil {
			s.flying[digest] = make(chan struct{})
		}
		s.mu.Unlock()
		if other == nil {
			break
		}
		select {
		case <-other:
		case <-ctx.Done():
			return Artifact{}, ctx.Err()
		}
	}
	defer func() {
		s.mu.Lock()
		close(s.flying[digest])
		delete(s.flying, digest)
		s.mu.Unlock()
	}()
	if a, err := s.revive(digest); !fault.Is(err, fault.NotFound) {
		return a, err
	}
	return work()
}

// add fetches, unpacks and publishes an image.
func (s *Store) add(ctx context.Context, img *source.Image, from string, p *progress) (Artifact, error) {
	if err := s.room(img.Size()); err != nil {
		return Artifact{}, err
	}
	st, err := s.stage()
	if err != nil {
		return Artifact{}, err
	}
	a, err := s.addStaged(ctx, st, img, from, p)
	return a, errors.Join(err, removeStaging(st.dir))
}

func (s *Store) addStaged(ctx context.Context, st *staging, img *source.Image, from string, p *progress) (Artifact, error) {
	tree, err := layer.New(st.tree, s.limits, func() error { return s.room(0) })
	if err != nil {
		return Artifact{}, err
	}
	err = s.unpack(ctx, st, img, tree, p)
	if err := errors.Join(err, tree.Close()); err != nil {
		return Artifact{}, err
	}
	p.step("build", "making one EROFS file", 0)
	if err := s.build(ctx, st, tree.Bytes()); err != nil {
		return Artifact{}, err
	}
	return s.publish(st, Artifact{
		Digest: img.Digest, Kind: KindOCI, Architecture: orDefault(img.Config.Architecture, "amd64"), Source: from, Config: configOf(img.Config),
	})
}

func orDefault(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func configOf(c *v1.ConfigFile) Config {
	return Config{
		Env: c.Config.Env, User: c.Config.User, Workdir: c.Config.WorkingDir,
		Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Labels: c.Config.Labels,
	}
}

// unpack applies all layers in order, while those that come over the network
// are downloaded ahead, a few at once.
func (s *Store) unpack(ctx context.Context, st *staging, img *source.Image, tree *layer.Applier, p *progress) error {
	p.begin(img)
	ready := make([]chan struct{}, len(img.Layers))
	for i := range ready {
		ready[i] = make(chan struct{})
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		for i := range img.Layers {
			select {
			case <-ready[i]:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if err := applyOne(ctx, img.Layers[i], st.blob(i), tree, p.unpacked); err != nil {
				return fmt.Errorf("layer %d of %d: %w", i+1, len(img.Layers), err)
			}
		}
		return nil
	})
	slots := make(chan struct{}, parallel)
	for i, l := range img.Layers {
		if !l.Remote {
			close(ready[i])
			continue
		}
		g.Go(func() error {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			defer func() { <-slots }()
			if err := download(ctx, l, st.blob(i), p.pulled); err != nil {
				return fmt.Errorf("layer %d of %d: %w", i+1, len(img.Layers), err)
			}
			close(ready[i])
			return nil
		})
	}
	return g.Wait()
}

// blob returns where the blob of a layer is kept until it is unpacked.
func (st *staging) blob(i int) string { return filepath.Join(st.dir, "layer-"+strconv.Itoa(i)) }

// download copies a layer's blob into a file and checks its digest and size.
// A broken connection is tried again, a wrong digest is not.
func download(ctx context.Context, l source.Layer, file string, count func(int64)) error {
	for try := 1; ; try++ {
		n := int64(0)
		err := downloadOnce(ctx, l, file, func(m int64) { n += m; count(m) })
		if err == nil {
			return nil
		}
		count(-n)
		if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove a broken download: %w", err)
		}
		f := fault.Of(err)
		if try == attempts || ctx.Err() != nil || f.Kind != fault.Unavailable && f.Kind != fault.Internal {
			return err
		}
		select {
		case <-time.After(time.Duration(try) * time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func downloadOnce(ctx context.Context, l source.Layer, file string, count func(int64)) error {
	r, err := l.Open(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	err = copyFile(file, source.Verify(counted{r, count}, "layer", l.Digest, l.Size), 0o600)
	var f *fault.Error
	switch {
	case err == nil, errors.As(err, &f), ctx.Err() != nil:
		return err
	case isDisk(err):
		return diskFault("keep layer "+l.Digest, err)
	}
	return fault.New(fault.Unavailable, "download layer %s: %w", l.Digest, err)
}

// isDisk reports whether an error came from writing a file, not from reading
// the network.
func isDisk(err error) bool {
	var perr *os.PathError
	return errors.As(err, &perr)
}

// applyOne lays one layer over the tree and checks its digests. A copy of its
// blob is removed at once: it is not needed again.
func applyOne(ctx context.Context, l source.Layer, file string, tree *layer.Applier, count func(int64)) error {
	var blob io.ReadCloser
	var err error
	checked := l.Digest
	if l.Remote {
		blob, err = os.Open(file)
		checked = "" // as it was downloaded
	} else {
		blob, err = l.Open(ctx)
	}
	if err != nil {
		return err
	}
	err = applyBlob(ctx, source.Verify(counted{blob, count}, "layer", checked, l.Size), l.DiffID, tree)
	err = errors.Join(err, blob.Close())
	if l.Remote {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

// applyBlob applies a layer from its checked blob. When that fails the rest of
// the blob is read all the same: that its digest is wrong explains more than
// what the damage did.
func applyBlob(ctx context.Context, blob io.Reader, diffID string, tree *layer.Applier) error {
	err := applyTar(ctx, blob, diffID, tree)
	if err != nil && (!fault.Is(err, fault.InvalidArgument) || ctx.Err() != nil) {
		return err
	}
	if _, berr := io.Copy(io.Discard, blob); berr != nil {
		return berr
	}
	return err
}

func applyTar(ctx context.Context, blob io.Reader, diffID string, tree *layer.Applier) error {
	plain, err := source.Decompress(blob)
	if err != nil {
		return err
	}
	defer plain.Close()
	content := source.Verify(plain, "the uncompressed layer", diffID, -1)
	if err := tree.Apply(ctx, content); err != nil {
		return err
	}
	return tree.Drain(ctx, content)
}

// counted reports what is read through it.
type counted struct {
	io.Reader
	count func(int64)
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.count(int64(n))
	return n, err
}

// progress turns counts from several goroutines into an orderly report: bytes
// pulled until all are there, then bytes unpacked.
type progress struct {
	report func(Progress)

	mu     sync.Mutex
	pull   Progress
	unpack Progress
	last   time.Time // of a report
}

func newProgress(report func(Progress)) *progress {
	if report == nil {
		report = func(Progress) {}
	}
	return &progress{report: report}
}

func (p *progress) begin(img *source.Image) {
	p.mu.Lock()
	defer p.mu.Unlock()
	detail := strconv.Itoa(len(img.Layers)) + " layers"
	p.pull = Progress{Step: "pull", Detail: detail}
	p.unpack = Progress{Step: "unpack", Detail: detail, Total: img.Size()}
	for _, l := range img.Layers {
		if l.Remote {
			p.pull.Total += l.Size
		}
	}
}

func (p *progress) pulled(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pull.Done += n
	p.show(p.pull)
}

func (p *progress) unpacked(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unpack.Done += n
	if p.pull.Done == p.pull.Total {
		p.show(p.unpack)
	}
}

// between is the least time between two reports of one step.
const between = 100 * time.Millisecond

// show reports, but not too often. p.mu is held.
func (p *progress) show(at Progress) {
	if at.Done != at.Total && time.Since(p.last) < between {
		return
	}
	p.last = time.Now()
	p.report(at)
}

func (p *progress) step(step, detail string, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report(Progress{Step: step, Detail: strings.TrimSpace(detail), Done: total, Total: total})
}
