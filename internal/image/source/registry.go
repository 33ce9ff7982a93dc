package source

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// stall is how long a download may stand still before it counts as broken.
const stall = time.Minute

// openRegistry opens an image in a registry or one of its mirrors.
func openRegistry(ctx context.Context, ref string, o Options) (*Image, error) {
	named, err := name.ParseReference(ref, nameOptions(o)...)
	if err != nil {
		return nil, fault.Invalid("source", "%q is no image reference, and no docker-archive:, oci: or oci-archive: either: %w", ref, err)
	}
	rt, err := newTransport(o)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, at := range places(named, o) {
		img, err := openAt(ctx, at, rt, o)
		if err == nil {
			img.close = func() error { rt.CloseIdleConnections(); return nil }
			return img, nil
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	rt.CloseIdleConnections()
	return nil, lastFault(errs)
}

// lastFault returns the origin's fault, with what the mirrors before it said.
func lastFault(errs []error) error {
	last := errs[len(errs)-1]
	if len(errs) == 1 {
		return last
	}
	f := *fault.Of(last)
	f.Message = fmt.Sprintf("%s (mirrors before it: %v)", f.Message, errors.Join(errs[:len(errs)-1]...))
	return &f
}

func nameOptions(o Options) []name.Option {
	if o.PlainHTTP {
		return []name.Option{name.Insecure}
	}
	return nil
}

// location is an image's name at one registry.
type location struct {
	ref    name.Reference
	origin bool
}

// places returns where to ask for an image: mirrors in order, then its own
// registry.
func places(named name.Reference, o Options) []location {
	var all []location
	repo := named.Context()
	host := repo.RegistryStr()
	mirrors := o.Mirrors[host]
	if host == name.DefaultRegistry {
		mirrors = append(mirrors[:len(mirrors):len(mirrors)], o.Mirrors["docker.io"]...)
	}
	sep := ":"
	if _, byDigest := named.(name.Digest); byDigest {
		sep = "@"
	}
	for _, m := range mirrors {
		m = strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(m, "https://"), "http://"), "/")
		at, err := name.ParseReference(m+"/"+repo.RepositoryStr()+sep+named.Identifier(), nameOptions(o)...)
		if err == nil {
			all = append(all, location{ref: at})
		}
	}
	return append(all, location{ref: named, origin: true})
}

// openAt opens an image at one registry.
func openAt(ctx context.Context, at location, rt *http.Transport, o Options) (*Image, error) {
	reg := at.ref.Context().Registry
	guard := schemeGuard{next: rt, plain: o.PlainHTTP}
	if err := probe(ctx, reg, guard, o.Seconds); err != nil {
		return nil, err
	}
	opts := []remote.Option{remote.WithTransport(guard)}
	if o.Username != "" && at.origin {
		opts = append(opts, remote.WithAuth(&authn.Basic{Username: o.Username, Password: o.Password}))
	} else {
		opts = append(opts, remote.WithAuthFromKeychain(authn.DefaultKeychain))
	}
	puller, err := remote.NewPuller(opts...)
	if err != nil {
		return nil, fmt.Errorf("set up the registry's client: %w", err)
	}
	r := registry{puller: puller, repo: at.ref.Context()}
	top, err := puller.Get(ctx, at.ref)
	if err != nil {
		return nil, registryFault(at.ref, err)
	}
	return r.image(ctx, top.Manifest, o)
}

// registry reads one repository.
type registry struct {
	puller *remote.Puller
	repo   name.Repository
}

func (r registry) image(ctx context.Context, top []byte, o Options) (*Image, error) {
	c := &chooser{arch: o.Architecture, fetch: r.manifest, config: r.blob}
	found, err := c.choose(ctx, top)
	if err != nil {
		return nil, err
	}
	cfg, err := c.configOf(ctx, found.manifest)
	if err != nil {
		return nil, err
	}
	img := &Image{Digest: found.digest, Config: cfg}
	for _, d := range found.manifest.Layers {
		img.Layers = append(img.Layers, Layer{
			Digest: d.Digest.String(), Size: d.Size, Remote: true,
			Open: func(ctx context.Context) (io.ReadCloser, error) { return r.open(ctx, d.Digest) },
		})
	}
	return img.complete(o)
}

func (r registry) manifest(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	ref := r.repo.Digest(d.Digest.String())
	got, err := r.puller.Get(ctx, ref)
	if err != nil {
		return nil, registryFault(ref, err)
	}
	return got.Manifest, checkDigest(got.Manifest, "manifest", d.Digest.String())
}

func (r registry) blob(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	rc, err := r.open(ctx, d.Digest)
	if err != nil {
		return nil, err
	}
	defer rc.Close()
	b, err := readDocument(Verify(rc, "blob", d.Digest.String(), -1), "blob "+d.Digest.String())
	if err != nil {
		return nil, registryFault(r.repo.Digest(d.Digest.String()), err)
	}
	return b, nil
}

func (r registry) open(ctx context.Context, digest v1.Hash) (io.ReadCloser, error) {
	ref := r.repo.Digest(digest.String())
	ctx, cancel := context.WithCancelCause(ctx)
	fail := func(err error) (io.ReadCloser, error) {
		cancel(nil)
		return nil, registryFault(ref, err)
	}
	l, err := r.puller.Layer(ctx, ref)
	if err != nil {
		return fail(err)
	}
	rc, err := l.Compressed()
	if err != nil {
		return fail(err)
	}
	stuck := fault.New(fault.Unavailable, "the download of %s stood still for %s", ref, stall)
	return &watched{
		rc: rc, ctx: ctx, cancel: cancel,
		timer: time.AfterFunc(stall, func() { cancel(stuck) }),
	}, nil
}

// watched is a download that ends when nothing comes for a while.
type watched struct {
	rc     io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.rc.Read(p)
	if n > 0 {
		w.timer.Reset(stall)
	}
	if err != nil && err != io.EOF && w.ctx.Err() != nil {
		err = context.Cause(w.ctx)
	}
	return n, err
}

func (w *watched) Close() error {
	w.timer.Stop()
	err := w.rc.Close()
	w.cancel(nil)
	return err
}

func newTransport(o Options) (*http.Transport, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if len(o.CA) > 0 && !pool.AppendCertsFromPEM(o.CA) {
		return nil, fault.Invalid("ca_pem", "ca_pem holds no PEM certificate")
	}
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: time.Duration(o.Seconds) * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig:       &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: 30 * time.Second,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   8,
		IdleConnTimeout:       30 * time.Second,
	}, nil
}

// schemeGuard refuses plain HTTP where nobody asked for it, redirects included.
type schemeGuard struct {
	next  http.RoundTripper
	plain bool
}

func (g schemeGuard) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme == "http" && !g.plain && !loopback(req.URL.Hostname()) {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return nil, fault.Invalid("insecure", "%s answers in plain HTTP only; set insecure to allow that", req.URL.Host)
	}
	return g.next.RoundTrip(req)
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// probe asks whether a registry answers at all, in seconds: its client retries
// for much longer.
func probe(ctx context.Context, reg name.Registry, rt http.RoundTripper, seconds int) error {
	short, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
	defer cancel()
	host := reg.RegistryStr()
	schemes := []string{"https"}
	if reg.Scheme() == "http" {
		schemes = append(schemes, "http")
	}
	var errs []error
	for _, scheme := range schemes {
		req, err := http.NewRequestWithContext(short, http.MethodGet, scheme+"://"+host+"/v2/", nil)
		if err != nil {
			return fault.Invalid("source", "the registry's name %q is wrong: %w", host, err)
		}
		resp, err := rt.RoundTrip(req)
		if err == nil {
			return resp.Body.Close()
		}
		if errs = append(errs, err); untrusted(err) {
			break
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return probeFault(host, seconds, short.Err() != nil, errs)
}

func probeFault(host string, seconds int, late bool, errs []error) error {
	err := errors.Join(errs...)
	switch {
	case untrusted(err):
		return fault.Invalid("ca_pem", "the certificate of %s is not trusted; give its authority's: %w", host, errs[0])
	case len(errs) == 1 && isPlainHTTP(errs[0]):
		return fault.Invalid("insecure", "%s answers in plain HTTP only; set insecure to allow that", host)
	case late:
		return fault.New(fault.Unavailable, "no answer from %s within %d s", host, seconds)
	}
	var f *fault.Error
	if errors.As(err, &f) && f.Kind == fault.InvalidArgument {
		return f
	}
	return fault.New(fault.Unavailable, "no answer from %s: %w", host, errs[len(errs)-1])
}

// untrusted reports an error about a server's certificate.
func untrusted(err error) bool {
	var verification *tls.CertificateVerificationError
	return errors.As(err, &verification)
}

func isPlainHTTP(err error) bool {
	var rec tls.RecordHeaderError
	return errors.As(err, &rec) || strings.Contains(err.Error(), "server gave HTTP response to HTTPS client")
}

// registryFault gives a registry's error its kind.
func registryFault(ref name.Reference, err error) error {
	var f *fault.Error
	if errors.As(err, &f) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	var te *transport.Error
	if !errors.As(err, &te) {
		return fault.New(fault.Unavailable, "read %s: %w", ref, err)
	}
	switch te.StatusCode {
	case http.StatusNotFound:
		return &fault.Error{Kind: fault.NotFound, Field: "source", Message: fmt.Sprintf("registry %s has no image %s", ref.Context().RegistryStr(), ref), Err: err}
	case http.StatusUnauthorized, http.StatusForbidden:
		return &fault.Error{Kind: fault.PermissionDenied, Field: "source", Domain: sandbox.User, Err: err,
			Message: fmt.Sprintf("registry %s refuses access to %s (private, misspelt, or the login is missing or wrong)", ref.Context().RegistryStr(), ref)}
	}
	return fault.New(fault.Unavailable, "registry %s answers %d for %s: %w", ref.Context().RegistryStr(), te.StatusCode, ref, err)
}
