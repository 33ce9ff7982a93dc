package apiserver

import (
	"cmp"
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"

	"github.com/kernflux/opendsec/internal/apiserver/placement"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// localPrefixes begin a source that is a path on the node.
var localPrefixes = []string{"docker-archive:", "oci-archive:", "oci:"}

// registryRef is the form of a reference to a registry. Whatever does not have
// it is taken for a path, which only the cluster's admins may name.
var registryRef = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$`)

func isLocal(source string) bool {
	lower := strings.ToLower(source)
	if slices.ContainsFunc(localPrefixes, func(p string) bool { return strings.HasPrefix(lower, p) }) {
		return true
	}
	return !registryRef.MatchString(strings.TrimPrefix(source, "docker://"))
}

func parseImage(field, name string) (sandbox.ImageName, error) {
	if name == "" {
		return sandbox.ImageName{}, fault.Invalid(field, "%s is missing: want project/name:tag, such as root/py:3.12", field)
	}
	n, err := sandbox.ParseImageName(name)
	if err != nil {
		return sandbox.ImageName{}, fault.Invalid(field, "%w", err)
	}
	return n, nil
}

// admitImport checks that the caller may bring an image in under a name.
func (s *Server) admitImport(ctx context.Context, source, name string) (sandbox.ImageName, error) {
	n, err := parseImage("name", name)
	if err != nil {
		return n, err
	}
	if source == "" {
		return n, fault.Invalid("source", "source is missing: want a registry reference, docker-archive:PATH, oci:PATH or oci-archive:PATH")
	}
	c := callerOf(ctx)
	if err := c.need(role.Developer, n.Project, "name"); err != nil {
		return n, err
	}
	if isLocal(source) {
		if err := c.needRootAdmin("an image from a path on the node"); err != nil {
			return n, err
		}
	}
	return n, s.projectExists(ctx, n.Project)
}

// admitBootstrap checks that the caller may have an image built under a name.
func (s *Server) admitBootstrap(ctx context.Context, distribution, name string) (sandbox.ImageName, error) {
	n, err := parseImage("name", name)
	if err != nil {
		return n, err
	}
	if distribution != "debian" {
		return n, fault.Invalid("distribution", "unknown distribution %.80q: there is debian", distribution)
	}
	if err := callerOf(ctx).needRootAdmin("building an image on the node"); err != nil {
		return n, err
	}
	return n, s.projectExists(ctx, n.Project)
}

// projectExists finds out before minutes of work whose result would have no home.
func (s *Server) projectExists(ctx context.Context, p sandbox.Project) error {
	_, err := s.deps.DB.GetProject(ctx, p)
	if fault.Is(err, fault.NotFound) {
		fault.Of(err).Field = "name"
	}
	return err
}

// imageNode returns the address of the node that fetches or builds an image:
// of the healthy ones, the one with the least on it.
func (s *Server) imageNode(ctx context.Context) (string, error) {
	usages, err := s.deps.DB.NodeUsages(ctx)
	if err != nil {
		return "", err
	}
	nodes := slices.DeleteFunc(s.nodes.placement(usages), func(n placement.Node) bool { return !n.Healthy || n.Drained })
	if len(nodes) == 0 {
		return "", fault.New(fault.Capacity, "no node can take an image at present: see `opendsecctl status`")
	}
	least := slices.MinFunc(nodes, func(a, b placement.Node) int {
		return cmp.Or(cmp.Compare(a.Used.Sandboxes, b.Used.Sandboxes), cmp.Compare(a.Name, b.Name))
	})
	return s.nodes.of(ctx, least.Name)
}

// nameImage records a name for content, and lets go of the content that had
// the name before.
func (s *Server) nameImage(ctx context.Context, m store.Image) error {
	before, err := s.deps.DB.PutImage(ctx, m)
	if err != nil {
		return err
	}
	if before != nil && before.Digest != m.Digest {
		s.dropContent(ctx, before.Digest)
	}
	return nil
}

// visibleImage returns an image that the caller can see.
func (s *Server) visibleImage(ctx context.Context, name string) (store.Image, error) {
	n, err := parseImage("name", name)
	if err != nil {
		return store.Image{}, err
	}
	if callerOf(ctx).sees(n.Project) {
		m, err := s.deps.DB.GetImage(ctx, n)
		if !fault.Is(err, fault.NotFound) {
			return m, err
		}
	}
	return store.Image{}, unknownImage(n)
}

func unknownImage(n sandbox.ImageName) error {
	err := fault.New(fault.NotFound, "image %s does not exist or is not visible to you: see `opendsecctl image list`", n)
	err.Field = "name"
	return err
}

func (s *Server) tagImage(ctx context.Context, name, newName string) (store.Image, error) {
	m, err := s.visibleImage(ctx, name)
	if err != nil {
		return m, err
	}
	n, err := parseImage("new_name", newName)
	if err != nil {
		return m, err
	}
	if err := callerOf(ctx).need(role.Developer, n.Project, "new_name"); err != nil {
		return m, err
	}
	m.Name, m.CreatedAt = n, s.deps.Now().UTC()
	err = s.nameImage(ctx, m)
	if fault.Is(err, fault.NotFound) {
		fault.Of(err).Field = "new_name"
	}
	return m, err
}

func (s *Server) deleteImage(ctx context.Context, name string) error {
	m, err := s.visibleImage(ctx, name)
	if err != nil {
		return err
	}
	if err := callerOf(ctx).need(role.Developer, m.Name.Project, "name"); err != nil {
		if fault.Is(err, fault.NotFound) { // it sees the image from a project below
			err = fault.New(fault.PermissionDenied, "deleting image %s needs the role developer in project %s", m.Name, m.Name.Project)
		}
		return err
	}
	if m, err = s.deps.DB.DeleteImage(ctx, m.Name); err != nil {
		if fault.Is(err, fault.NotFound) {
			return unknownImage(m.Name)
		}
		return err
	}
	s.dropContent(ctx, m.Digest)
	return nil
}

// dropContent removes content that has no name any more from the nodes; each
// keeps it as long as a sandbox uses it. A node that cannot be reached keeps
// the content, which costs it space and nothing else.
func (s *Server) dropContent(ctx context.Context, digest string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	use, err := s.deps.DB.CountDigest(ctx, digest)
	if err != nil {
		s.log.Warn("count the names of image content", "digest", digest, "error", err)
		return
	}
	if use.Names > 0 {
		return
	}
	nodes, err := s.deps.DB.ListNodes(ctx)
	if err != nil {
		s.log.Warn("list the nodes that may hold image content", "digest", digest, "error", err)
		return
	}
	for _, n := range nodes {
		if r := s.nodes.report(n); r.GetUnhealthy() != "" && !slices.Contains(r.GetImages(), digest) {
			continue
		}
		if err := s.edges.deleteImage(ctx, n.Address, digest); err != nil && !errors.Is(err, context.Canceled) {
			s.log.Warn("remove image content from a node", "node", n.Name, "digest", digest, "error", err)
		}
	}
}

// listImages returns the images visible in a project.
func (s *Server) listImages(ctx context.Context, project string) ([]store.Image, error) {
	p, err := parseProject(project)
	if err != nil {
		return nil, err
	}
	if err := callerOf(ctx).need(role.Viewer, p, "project"); err != nil {
		return nil, err
	}
	return s.deps.DB.ListImages(ctx, p.Lineage()...)
}
